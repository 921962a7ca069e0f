// What may be changed while a run goes on, and who changed it.

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
      // The name of a scorer needs no quotation marks.
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
          <span class="quiet">read only; agentrl ui --allow_control changes them</span>
        )
      }
    >
      {error && <Problem text={error} />}
      <Facts
        wide
        rows={Object.entries(view.control).map(([key, value]) => [
          key,
          value === null ? <span class="quiet">as started</span> : String(value),
        ])}
      />
      {may && (
        <form class="row" onSubmit={submit}>
          <Field label="Control">
            <select value={name} onChange={(event) => setName(event.currentTarget.value)}>
              {Object.keys(view.control).map((key) => <option key={key}>{key}</option>)}
            </select>
          </Field>
          <Field label="Value (null: as started)"><input name="value" required /></Field>
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
