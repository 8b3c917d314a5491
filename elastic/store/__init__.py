"""The membership store: what it must do (`interface`), and three backends, chosen by `open`."""
