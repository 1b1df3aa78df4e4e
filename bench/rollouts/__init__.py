"""What the runner makes of environments whose steps take a tenth of a second to half a minute."""
