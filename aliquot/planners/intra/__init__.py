"""How each operator of one stage is split on a logical mesh."""
