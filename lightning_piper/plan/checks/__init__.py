"""Checks of compiled plans: they finish, and no instruction reads memory that another stream still writes."""
