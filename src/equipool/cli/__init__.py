"""The command line: ``app`` starts it, ``options`` declares it, ``commands`` do what is asked."""
