"""Environments for reinforcement learning, behind one small interface."""
