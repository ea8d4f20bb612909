"""The line of the user's code from which an operation or an error comes, and whether an error is the
user's."""
