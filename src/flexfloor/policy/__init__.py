"""Policy: which request goes where. Knows the fleet by its status only; never imports torch."""
