// The controls of a live run, and the log of their changes.

import { useState } from "preact/hooks";
import { ofRun, type Overview, tell } from "../api";
import { Ago, Facts, Field, Problem, Section } from "../parts";

export function Controls(props: { run: string; view: Overview; may: boolean; done: () => void }) {
  const { run, view, may, done } = props;
  const [error, setError] = useState<string | null>(null);
  const [name, setName] = useState("max_staleness");
  const set = async (changes: object) => {
    try {
      await tell(ofRun(run, "control"), changes);
      setError(null);
      done();
    } catch (problem) {
      setError((problem as Error).message);
    }
  };
  const submit = (event: SubmitEvent) => {
    event.preventDefault();
    const form = event.currentTarget as HTMLFormElement;
    const typed = String(new FormData(form).get("value") ?? "").trim();
    let value: unknown = typed;
    try {
      value = JSON.parse(typed);
    } catch {
      // Text that is not JSON, such as the name of a scorer, is taken literally.
    }
    void set({ [name]: value });
  };
  const paused = view.control.sampling_paused;
  return (
    <Section
      title="Controls"
      aside={
        may ? (
          <button type="button" onClick={() => set({ sampling_paused: !paused })}>
            {paused ? "Resume sampling" : "Pause sampling"}
          </button>
        ) : (
          <span class="quiet">read-only; start agentrl ui with --allow_control to change them</span>
        )
      }
    >
      {error && <Problem text={error} />}
      <Facts
        wide
        rows={Object.entries(view.control).map(([key, value]) => [
          key,
          value === null ? <span class="quiet">as configured</span> : String(value),
        ])}
      />
      {may && (
        <form class="row" onSubmit={submit}>
          <Field label="Control">
            <select value={name} onChange={(event) => setName(event.currentTarget.value)}>
              {Object.keys(view.control).map((key) => <option key={key}>{key}</option>)}
            </select>
          </Field>
          <Field label="Value (null: as configured)"><input name="value" required /></Field>
          <button type="submit">Set</button>
        </form>
      )}
      {view.control_log.length > 0 && (
        <details class="fold">
          <summary>{view.control_log.length} changes</summary>
          <ul>
            {[...view.control_log].reverse().map((change) => (
              <li key={change.at}>
                <Ago at={change.at} /> by {change.by || "unknown"}: {JSON.stringify(change.before)} →{" "}
                {JSON.stringify(change.after)}
              </li>
            ))}
          </ul>
        </details>
      )}
    </Section>
  );
}
