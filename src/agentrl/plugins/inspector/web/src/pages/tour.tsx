// The path through the example run, on its page.

import { Link } from "wouter-preact";
import type { Tour } from "../api";
import { diffPath, groupPath, recordPath, Section, stepPath } from "../parts";

export function TourCard({ run, tour }: { run: string; tour: Tour }) {
  return (
    <Section title="A path through this run">
      <ol class="tour">
        <li><Link href={stepPath(run, tour.step)}>Step {tour.step}</Link>: what one optimizer step read, trained and left out.</li>
        <li><Link href={groupPath(run, tour.task_id)}>A group of that step</Link>: all attempts at one question, drawn as a tree that branches where they part.</li>
        <li><Link href={recordPath(run, tour.loser, { turn: String(tour.turn) })}>The turn that lost it</Link>: where an attempt without a reward first left the path of the one that succeeded.</li>
        <li><Link href={diffPath(run, tour.winner, tour.loser)}>Both attempts</Link>, side by side.</li>
      </ol>
      <p class="quiet">
        In a run of your own, <code>agentrl ui --allow_control</code> adds a button to each turn that tries it again.
      </p>
    </Section>
  );
}
