"""Programs that run in the interpreter of an inference server, where AgentRL is not installed.

They have a folder of their own because Python puts a program's folder before all others.
"""
