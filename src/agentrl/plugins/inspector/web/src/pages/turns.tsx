// The turns of a group that branches, a row for each rollout: coloured by worth or by credit.

import { useEffect, useRef } from "preact/hooks";
import { Link, useLocation, useSearch } from "wouter-preact";
import { query, type TurnRow } from "../api";
import { Field, number, recordPath, runPath, ScoreChip, scoreClass, Section } from "../parts";
import { visible } from "../texts";

type Colouring = "worth" | "credit";
type TurnCell = TurnRow["turns"][number];
const STEPS = [0, 0.25, 0.5, 0.75, 1];

export function TurnTree({ run, task, rows }: { run: string; task: string; rows: TurnRow[] }) {
  const given = new URLSearchParams(useSearch());
  const [, go] = useLocation();
  const colouring: Colouring = given.get("colour") === "credit" ? "credit" : "worth";
  const at = given.get("at");
  const chosen = useRef<HTMLDivElement>(null);
  useEffect(() => chosen.current?.querySelector("[aria-current]")?.scrollIntoView({ block: "center" }), [at]);
  const choose = (colour: string) => go(`${runPath(run)}/group${query({ task, at, colour })}`, { replace: true });
  const largest = Math.max(0, ...rows.flatMap((row) => row.turns.map((turn) => Math.abs(turn.credit ?? 0))));
  const shade = (value: number | null) =>
    value === null || colouring === "worth" ? value : largest ? 0.5 + value / (2 * largest) : 0.5;
  const valueOf = (turn: TurnCell) => (colouring === "worth" ? turn.worth?.after ?? null : turn.credit);
  const depth = Math.max(...rows.map((row) => row.shared + row.turns.length));
  return (
    <Section
      title="Turns"
      aside={
        <Field label="Color turns by">
          <select value={colouring} onChange={(event) => choose(event.currentTarget.value)}>
            <option value="worth">worth</option>
            <option value="credit">credit</option>
          </select>
        </Field>
      }
    >
      <p class="quiet">
        {colouring === "worth"
          ? "Worth: mean score of the rollouts through a turn, each as probable as under chains."
          : "Credit: the advantage with which the last step trained a turn; – where none did."}{" "}
        A line shows which turn a branch continues; × counts the scored rollouts through a turn.
      </p>
      <ul class="scale" aria-label={`Colors of ${colouring}`}>
        {STEPS.map((step) => (
          <li key={step} class={scoreClass(step)}>
            {colouring === "worth" ? `${step === 0 ? "≤ " : step === 1 ? "≥ " : ""}${step}` : signed((2 * step - 1) * largest)}
          </li>
        ))}
        <li class="score-none">–</li>
      </ul>
      <div ref={chosen} class="scroll" tabIndex={0} role="region" aria-label="Turns">
        <table class="turn-tree">
          <thead>
            <tr>
              <th scope="col">Rollout</th><th scope="col">Score</th>
              {Array.from({ length: depth }, (_, at) => <th key={at} scope="col">Turn {at}</th>)}
            </tr>
          </thead>
          <tbody>
            {rows.map((row, place) => (
              <tr key={row.record_id}>
                <th scope="row">
                  <Link href={recordPath(run, row.record_id)} data-row>{row.traj_id}</Link>
                  {row.parent !== null && (
                    <span class="quiet" title={row.reason}> leaves {row.parent} before turn {row.shared}, {row.rule}</span>
                  )}
                </th>
                <td><ScoreChip score={row.score} /></td>
                {Array.from({ length: row.shared }, (_, turn) => (
                  <td key={turn} class={`way${turn === row.shared - 1 ? " way-in" : ""}${goesOn(rows, place, turn) ? " way-on" : ""}`} />
                ))}
                {row.turns.map((turn) => (
                  <td key={turn.index}>
                    <Link
                      class={`turn-cell ${scoreClass(shade(valueOf(turn)))}`}
                      href={recordPath(run, row.record_id, { turn: String(turn.index) })}
                      title={facts(turn)}
                      aria-current={at === `${row.traj_id}/${turn.index}` ? "true" : undefined}
                      aria-label={`Turn ${turn.index} of rollout ${row.traj_id}: ${facts(turn)}`}
                    >
                      <b>{colouring === "worth" ? number(valueOf(turn), 2) : signed(valueOf(turn))}</b>
                      <span> × {turn.worth?.num_leaves ?? 0}</span>
                      <span class="clip" dir="ltr">{visible(turn.text.slice(0, 60))}</span>
                    </Link>
                  </td>
                ))}
                {Array.from({ length: depth - row.shared - row.turns.length }, (_, turn) => <td key={-1 - turn} />)}
              </tr>
            ))}
          </tbody>
        </table>
      </div>
    </Section>
  );
}

/** Whether the line of a later branch passes a row: the branch continues the same turn of a row above. */
function goesOn(rows: TurnRow[], at: number, turn: number): boolean {
  const below = rows.slice(at + 1);
  const end = below.findIndex((row) => row.shared <= turn);
  return (end < 0 ? below : below.slice(0, end)).some((row) => row.shared === turn + 1);
}

function facts(turn: TurnCell): string {
  const worth = turn.worth;
  const moved = worth
    ? `worth ${number(worth.after - worth.change, 2)} before, ${number(worth.after, 2)} after, ${worth.num_leaves} scored rollouts`
    : "no scored rollout";
  return `${turn.text}; ${moved}; ${turn.credit === null ? "not trained" : `credit ${number(turn.credit)}`}`;
}

export function signed(value: number | null, digits = 2): string {
  if (value === null) return "–";
  return `${value > 0 ? "+" : value < 0 ? "−" : ""}${number(Math.abs(value), digits)}`;
}
