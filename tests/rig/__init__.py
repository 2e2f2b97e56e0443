"""What service tests share: a real server in a process of its own, and raw calls to it."""
