"""Images, their crops and corruptions, and ImageNet."""
