"""Who runs where and when: what a request will cost, whether it is taken on, and whose turn it is."""
