"""Names of parts that are not of the user's choice. Standard library only: children import it."""

# Of the counting reward; as a part, what somebody gave under that name.
MAIN = "reward"
LENGTH, FORMAT, JUDGE = "length", "format", "judge"
