"""What is known of the main loop for tensor memory without its hardware: its order of events, and what it computes."""
