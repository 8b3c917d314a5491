"""torch.distributed groups that form, break and form again in one process."""
