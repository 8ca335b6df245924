#!/usr/bin/env bash
# stop-slurm.sh STATE_DIR - cancels every job, then ends exactly the daemons that start-slurm.sh
# has recorded, by their pids.
set -uo pipefail
state=$(realpath -m "$1")
[ -d "$state/run" ] || exit 0
export SLURM_CONF=$state/slurm.conf

is() { # is PID NAME: that process exists, is no zombie and has that name
  local command status
  [ -r "/proc/$1/stat" ] && read -r _ command status _ <"/proc/$1/stat" || return 1
  [ "$status" != Z ] && [ "$command" = "($2)" ]
}

# Jobs first: a slurmstepd outlives its slurmd, and without the other daemons it retries for ever.
if timeout 5 scontrol ping 2>/dev/null | grep -q UP; then
  timeout 10 scancel --me 2>/dev/null
  timeout 10 scancel --full --signal=KILL --me 2>/dev/null
  for _ in $(seq 150); do
    timeout 5 squeue -h -t all -o %T | grep -qE 'PEND|RUN|ING$|SUSP|REQ' || break
    sleep 0.1
  done
fi
for process in /proc/[0-9]*; do # what is left: step daemons that hold one of our logs open
  pid=${process#/proc/}
  is "$pid" slurmstepd && ls -l "$process/fd" 2>/dev/null | grep -qF " $state/log/" && kill -9 "$pid"
done
for file in "$state"/run/{slurmd.node*,slurmctld,slurmdbd,mariadbd,munged}.pid; do
  [ -f "$file" ] || continue
  pid=$(cat "$file") name=$(basename "$file" .pid)
  name=${name%%.*}
  if is "$pid" "$name"; then
    kill "$pid"
    for _ in $(seq 100); do is "$pid" "$name" || break; sleep 0.1; done
    is "$pid" "$name" && kill -9 "$pid"
  fi
  rm -f "$file"
done
exit 0
