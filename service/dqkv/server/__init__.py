"""The server: takes requests over gRPC, hands them to the scheduler, and tells operators how it is."""
