"""Images, their crops and corruptions, and ImageNet: read, decoded, checked. No task in here."""
