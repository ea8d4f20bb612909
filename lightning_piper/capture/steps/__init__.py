"""What is the code of a captured step for each batch size?"""
