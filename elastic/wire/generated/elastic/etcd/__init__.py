"""Made from proto/elastic/etcd/ by scripts/gen_proto.py; do not edit."""
