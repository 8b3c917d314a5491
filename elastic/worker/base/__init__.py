"""What all parts of a worker use: mailboxes between its threads, interrupts, signs of progress."""
