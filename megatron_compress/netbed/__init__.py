"""Slow networks on one machine: a chain of nodes, each a network namespace, whose links have a rate and a delay."""
