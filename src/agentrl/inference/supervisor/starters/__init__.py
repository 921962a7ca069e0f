"""Programs that run in the interpreter of an inference server, where AgentRL is not installed.

They have their own folder because Python puts a program's folder first on `sys.path`, where
AgentRL's modules would shadow others of the same name.
"""
