"""Which metric objects does a step call, and with which arguments?"""
