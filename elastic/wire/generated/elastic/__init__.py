"""Made from proto/elastic/ by scripts/gen_proto.py; do not edit."""
