"""DPO post-training: TRL's own flags, made to work together under DeepSpeed ZeRO-2.

Importing the package reads .env, so commands import it before the libraries that look at HF_HOME and the tokens.
"""

import warnings

from dotenv import load_dotenv

from sfm_dpo.redact import check_env_file, env_file, warn_of_open_env_file

check_env_file()
load_dotenv(env_file())
warn_of_open_env_file()
warnings.filterwarnings("ignore", category=FutureWarning)  # deprecations are for developers, not for a job's log
