// All scenarios on a run of images with classes.

import { accessibility } from "./accessible.mjs";
import { deciding } from "./deciding.mjs";
import { quiet, tour } from "./driving.mjs";
import { examples } from "./examples.mjs";
import { late } from "./late.mjs";
import { overview } from "./overview.mjs";
import { reported } from "./report.mjs";

await tour({
  ...overview,
  ...examples,
  ...deciding,
  ...late,
  ...accessibility,
  ...reported,

  async no_errors_in_any_scenario({ world }) {
    quiet(world);
  },
});
