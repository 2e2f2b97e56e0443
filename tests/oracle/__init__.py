"""What the gradients of attention must be: cases, their exact float64 answers, and how near is right."""
