"""Rollouts of agents that are commands, run here."""
