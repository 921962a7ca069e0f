// The turns of a run where the policy lost most, according to the rollouts that took another one.

import { Link } from "wouter-preact";
import { type Decisions, ofRun, query, useAsk, useNews } from "../api";
import { Loading, number, Problem, recordPath, RunHead, runPath, ScoreChip, stepPath } from "../parts";
import { visible } from "../texts";
import { signed } from "./turns";

export function DecisionsPage({ run }: { run: string }) {
  const { tick } = useNews(run);
  const { value, error } = useAsk<Decisions>(ofRun(run, "decisions"), tick);
  return (
    <>
      <RunHead run={run} title="Worst decisions" />
      {error && <Problem text={error} />}
      {!value && !error && <Loading />}
      {value && !value.rows.length && (value.has_branches ? <NothingYet /> : <Chains run={run} />)}
      {value && value.rows.length > 0 && (
        <>
          <p class="quiet">
            Trained turns after which the worth fell most: the mean score of the rollouts through a turn, against that
            of all rollouts through the state before it. Only turns at which rollouts part or that several share.
            A fall belongs to the turn and what followed it in the same rollouts.
          </p>
          <div class="card scroll" tabIndex={0} role="region" aria-label="Worst decisions">
            <table>
              <thead>
                <tr>
                  <th scope="col" class="num">Change</th><th scope="col">Before</th><th scope="col">After</th>
                  <th scope="col">Turn</th><th scope="col">Question</th>
                  <th scope="col" class="num">Rollouts</th><th scope="col" class="num">Credit</th>
                  <th scope="col" class="num">Step</th><th scope="col">Record</th>
                </tr>
              </thead>
              <tbody>
                {value.rows.map((row) => <Row key={`${row.step}/${row.record_id}/${row.index}`} run={run} row={row} />)}
              </tbody>
            </table>
          </div>
        </>
      )}
    </>
  );
}

function Row({ run, row }: { run: string; row: Decisions["rows"][number] }) {
  const { after, change, num_leaves } = row.worth;
  const at = `${row.record_id.slice(row.task_id.length + 1)}/${row.index}`;
  return (
    <tr>
      <td class="num"><b>{signed(change)}</b></td>
      <td><ScoreChip score={after - change} /></td>
      <td><ScoreChip score={after} /></td>
      <td class="did">
        <Link href={`${runPath(run)}/group${query({ task: row.task_id, at })}`} data-row><code dir="ltr">{visible(row.text) || "(no text)"}</code></Link>
      </td>
      <td class="question">{visible(row.question)}</td>
      <td class="num">{num_leaves}</td>
      <td class="num">{signed(row.credit)}</td>
      <td class="num"><Link href={stepPath(run, row.step)}>{number(row.step)}</Link></td>
      <td><Link href={recordPath(run, row.record_id, { turn: String(row.index) })}>{row.record_id}, turn {row.index}</Link></td>
    </tr>
  );
}

function NothingYet() {
  return (
    <p class="quiet">
      No step has trained a turn after which the worth fell. Steps of releases before this page stored no worth of turns;
      the page of a group shows it for them as well.
    </p>
  );
}

function Chains({ run }: { run: string }) {
  return (
    <section class="card">
      <p>
        The rollouts of this run are chains: each starts at the question, and all of its turns have its score. That
        tells which rollout lost, and not at which turn.
      </p>
      <p>
        Worth of single turns comes from rollouts that leave others midway: start a run with{" "}
        <code>--rollouts tree</code>. Its tools must be resumable or have a session per rollout. Where turns have
        rewards of their own, <code>agentrl inspect turns --by credit --run_name {run}</code> lists those of lowest credit.
      </p>
    </section>
  );
}
