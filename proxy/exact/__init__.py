"""exact_context: a continuation is answered on the very ids that were sampled before, where plain chat would drift."""
