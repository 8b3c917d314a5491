"""Made from proto/elastic/etcd/v1/ by scripts/gen_proto.py; do not edit."""
