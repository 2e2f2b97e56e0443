"""The commands of `dqkv`: each module is one of them, or what two of them share."""
