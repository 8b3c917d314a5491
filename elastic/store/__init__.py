"""The membership store: one interface (`interface`), three backends, chosen by `open`."""
