"""Training with Hugging Face's libraries; shaped like ray.train.huggingface."""
