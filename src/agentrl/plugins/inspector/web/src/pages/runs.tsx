// All runs of a folder or server, and the selection of runs to compare.

import { useEffect, useState } from "preact/hooks";
import { Link, useLocation } from "wouter-preact";
import { query, type RunRow, type Session, useAsk } from "../api";
import { Ago, Badge, Imported, Loading, number, Problem, runPath, Spark, Status, useTitle } from "../parts";

const POLL_MS = 2500;
const MOST_COMPARED = 8;

export function RunsPage({ session }: { session: Session | null }) {
  useTitle("Runs");
  const [tick, setTick] = useState(0);
  const [chosen, choose] = useState<string[]>([]);
  const [, go] = useLocation();
  const { value, error } = useAsk<{ runs: RunRow[]; reading: string[] }>("/api/runs", tick);
  const waits = value && (value.reading.length > 0 || value.runs.some((run) => run.is_live));
  useEffect(() => {
    if (!waits) return;
    const timer = window.setTimeout(() => !document.hidden && setTick(tick + 1), POLL_MS);
    return () => window.clearTimeout(timer);
  }, [value, waits]);
  const toggle = (name: string) =>
    choose(chosen.includes(name) ? chosen.filter((one) => one !== name) : [...chosen, name]);
  return (
    <>
      <div class="head">
        <h1>Runs</h1>
        <span class="quiet">{session?.place}</span>
        <span class="spring" />
        <button
          type="button"
          disabled={chosen.length < 2 || chosen.length > MOST_COMPARED}
          title="Choose two to eight runs"
          onClick={() => go(`/compare${query({ runs: chosen.join(",") })}`)}
        >
          Compare {chosen.length || ""}
        </button>
      </div>
      {error && <Problem text={error} />}
      {!value && !error && <Loading />}
      {value && !value.runs.length && !value.reading.length && (
        <p class="card">
          No runs yet. <code>agentrl run --run_name demo</code> trains the demo.
        </p>
      )}
      {value && value.runs.length > 0 && (
        <div class="scroll card" tabIndex={0} role="region" aria-label="Runs">
          <table>
            <thead>
              <tr>
                <th scope="col"><span class="hidden">Compare</span></th>
                <th scope="col">Run</th>
                <th scope="col">Status</th>
                <th scope="col">Reward</th>
                <th scope="col" class="num">Last</th>
                <th scope="col" class="num">Evaluation</th>
                <th scope="col" class="num">Step</th>
                <th scope="col">Updated</th>
              </tr>
            </thead>
            <tbody>
              {value.runs.map((run) => (
                <Row key={run.name} run={run} chosen={chosen.includes(run.name)} toggle={toggle} />
              ))}
            </tbody>
          </table>
        </div>
      )}
      {value && value.reading.length > 0 && (
        <p class="quiet" role="status">Reading {value.reading.join(", ")}…</p>
      )}
    </>
  );
}

function Row(props: { run: RunRow; chosen: boolean; toggle: (name: string) => void }) {
  const { run } = props;
  const rewards = run.rewards.filter((reward) => reward !== null);
  return (
    <tr>
      <td>
        <input
          type="checkbox"
          checked={props.chosen}
          onChange={() => props.toggle(run.name)}
          aria-label={`Compare ${run.name}`}
        />
      </td>
      <td><Link href={runPath(run.name)} data-row>{run.name}</Link></td>
      <td>
        <Status value={run.status} /> {run.is_live && <Badge kind="live">live</Badge>} {run.is_imported && <Imported />}
        {run.error && <span class="quiet"> {run.error}</span>}
      </td>
      <td><Spark values={run.rewards} label={`Reward of ${run.name} over its last steps`} /></td>
      <td class="num">{number(rewards[rewards.length - 1], 3)}</td>
      <td class="num">{number(run.eval, 3)}</td>
      <td class="num">{number(run.step)}{run.max_steps ? ` / ${run.max_steps}` : ""}</td>
      <td><Ago at={run.updated_at} /></td>
    </tr>
  );
}
