"""From T1-weighted heads to brains on the standard grid."""
