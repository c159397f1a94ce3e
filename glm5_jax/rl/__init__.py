"""Reinforcement learning: from trajectories and rewards to what the objectives of losses/ learn from."""
