// A run of images with classes: all that people can see and do.

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

  async quiet_all_the_time({ world }) {
    quiet(world);
  },
});
