"""Implementations of the Transport protocol: in-process queues and torch.distributed's gloo."""
