"""`dstk memory`: what it is asked, the estimate, and the table that it prints."""
