"""Made from proto/elastic/v1/ by scripts/gen_proto.py; do not edit."""
