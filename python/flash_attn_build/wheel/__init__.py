"""What a wheel must be: platform tag, licences, bill of materials, and the checks of all that."""
