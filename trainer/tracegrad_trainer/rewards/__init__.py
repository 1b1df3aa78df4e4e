"""Rewards that somebody or something works out: functions, commands, a judge, and their sum."""
