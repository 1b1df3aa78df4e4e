"""Who a caller is, what it may do, and whose rollout a call belongs to."""
