"""The configuration of a process: flags and YAML to checked sections.

Three kinds of settings exist, each for its own reader:

- The sections here are what a person sets: flat flags, written beside the run and into its database.
- `tools.ToolsConfig`, `rewards.AgentConfig` and `inference.engine`'s `EngineConfig` are what one
  component is built from. They are made from sections, or from files of other projects' form
  (`mcpServers` JSON, judge YAML), and are independent of flags.
- `schema.Control` is what may change while a run continues. It lives in the `runs` document.
"""
