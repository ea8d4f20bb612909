"""Checks of compiled plans: the plans finish, and no instruction reads memory that another stream still
writes."""
