#!/usr/bin/env bash
# start-slurm.sh STATE_DIR - a real Slurm cluster of virtual nodes on this host, for the tests.
#
# Loopback only, no systemd, no cgroups, as root or as an ordinary user. It installs nothing and
# starts only what is not running, so it also brings a crashed node back. Then: . STATE_DIR/env.sh
#
#   PORT=16817 (and the next NODES+1 ports)  CPUS=16  MEM=8000  GPUS=2  KILLWAIT=5
#
# Six nodes, in pairs, so that tests which take nodes away can run beside the others:
#   main, other          node1 and node2: ordinary jobs
#   preemptable, urgent  node3 and node4: jobs in urgent preempt those in preemptable
#   fragile              node5 and node6: nodes that may crash
# The processors are far more than the machine has: most jobs of the tests wait for something.
#
# Where namespaces are allowed, each node has its own host name (node1, node2, ...) and /etc/hosts;
# elsewhere nodes are named 127.0.0.11, 127.0.0.12, ..., which resolve anywhere. Where slurmdbd and
# MariaDB are installed there is a real accounting; the package does not need one.
set -euo pipefail
PATH=$PATH:/usr/sbin:/sbin
state=$(realpath -m "$1")
NODES=6 CPUS=${CPUS:-16} MEM=${MEM:-8000} GPUS=${GPUS:-2} PORT=${PORT:-16817} KILLWAIT=${KILLWAIT:-5}
host=$(hostname -s) user=$(id -un)
umask 022
mkdir -p "$state"/{munge,ctld,spool,log,run,dev}
chmod 755 "$state" "$state/munge"
exec 9>"$state/run/lock"
flock 9

namespaces=(unshare --uts --mount)
[ "$(id -u)" = 0 ] || namespaces=(unshare --map-current-user --keep-caps --uts --mount)
mode=plain
"${namespaces[@]}" mount --bind /etc/hosts /etc/hosts 2>/dev/null && mode=named
accounting=no
command -v slurmdbd mariadbd mariadb-install-db >/dev/null && accounting=yes

name() { if [ $mode = named ]; then echo "node$1"; else echo "127.0.0.$((10 + $1))"; fi; }

partition() { # partition NAME FIRST-NODE SETTINGS...
  echo "PartitionName=$1 Nodes=$(name "$2"),$(name $(($2 + 1))) DefaultTime=10 ${*:3}"
}

alive() { # the process of run/NAME.pid exists, is no zombie and is that daemon
  local pid command status
  pid=$(cat "$state/run/$1.pid" 2>/dev/null) && [ -r "/proc/$pid/stat" ] || return 1
  read -r _ command status _ <"/proc/$pid/stat"
  [ "$status" != Z ] && [ "$command" = "(${1%%.*})" ]
}

run() { # run NAME HOSTNAME COMMAND...: detached; everything execs, so $! is the daemon's own pid
  local name=$1 hostname=$2
  shift 2
  alive "$name" && return 0
  if [ $mode = named ] && [ "$hostname" ]; then
    set -- "${namespaces[@]}" sh -c \
      'mount --bind "$0" /etc/hosts && hostname "$1" && shift && exec "$@"' "$state/hosts" "$hostname" "$@"
  fi
  setsid "$@" </dev/null >>"$state/log/$name.out" 2>&1 9>&- &
  echo $! >"$state/run/$name.pid"
}

wait_for() { # wait_for TENTHS COMMAND...
  local i
  for i in $(seq "$1"); do "${@:2}" >/dev/null 2>&1 && return 0; sleep 0.1; done
  echo "start-slurm: gave up on: ${*:2}" >&2
  tail -n 8 "$state"/log/*.out >&2
  exit 1
}

configure() {
  # Never one job id twice: an older cluster's result files must not be taken for this one's.
  [ -f "$state/first-job-id" ] || echo $(($(date +%s) % 60000000)) >"$state/first-job-id"
  echo 127.0.0.1 localhost "$host" $(for i in $(seq "$NODES"); do name "$i"; done) >"$state/hosts"
  # Unused, but slurmd's search for a cgroup is fatal where none is mounted.
  echo CgroupPlugin=cgroup/v1 >"$state/cgroup.conf"
  # Pretend GPUs: plain files stand for the devices.
  for i in $(seq 0 $((GPUS - 1))); do : >"$state/dev/nvidia$i"; done
  echo "Name=gpu File=$state/dev/nvidia[0-$((GPUS - 1))]" >"$state/gres.conf"
  {
    cat <<END
ClusterName=lab
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=$PORT
SlurmUser=$user
SlurmdUser=$user
AuthType=auth/munge
CredType=cred/munge
# A requeued job starts again one second after its credential has expired.
AuthInfo=socket=$state/munge/socket,cred_expire=5
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
StateSaveLocation=$state/ctld
SlurmdSpoolDir=$state/spool/%n
SlurmctldPidFile=$state/run/own.ctld.pid
SlurmdPidFile=$state/run/own.slurmd.%n.pid
SlurmctldLogFile=$state/log/slurmctld.log
SlurmdLogFile=$state/log/slurmd.%n.log
PlugStackConfig=/dev/null
MailProg=/bin/true
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
JobCompType=jobcomp/none
ReturnToService=2
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
DefMemPerNode=256
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=1,sched_min_interval=0,bf_interval=1
EnforcePartLimits=ALL
FirstJobId=$(cat "$state/first-job-id")
MinJobAge=86400
JobRequeue=1
KillWait=$KILLWAIT
SlurmdTimeout=30
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
GresTypes=gpu
END
    if [ $accounting = yes ]; then
      printf '%s\n' AccountingStorageType=accounting_storage/slurmdbd AccountingStorageHost=127.0.0.1 \
        "AccountingStoragePort=$((PORT + NODES + 1))" "AccountingStoragePass=$state/munge/socket"
    fi
    for i in $(seq "$NODES"); do
      node_host=$host
      [ $mode = named ] && node_host=node$i
      echo "NodeName=$(name "$i") NodeHostname=$node_host NodeAddr=127.0.0.1 Port=$((PORT + i))" \
        "CPUs=$CPUS RealMemory=$MEM Gres=gpu:$GPUS"
    done
    partition main 1 Default=YES
    partition other 1
    partition preemptable 3 GraceTime=20
    partition urgent 3 PriorityTier=10 PreemptMode=OFF
    partition fragile 5
  } >"$state/slurm.conf"
  echo "export SLURM_CONF='$state/slurm.conf'" >"$state/env.sh"
}

start_munge() {
  [ -f "$state/munge/key" ] || (umask 077 && head -c 128 /dev/urandom >"$state/munge/key")
  run munged '' munged -F --num-threads=2 --key-file="$state/munge/key" --socket="$state/munge/socket" \
    --pid-file="$state/munge/pid" --log-file="$state/munge/log" --seed-file="$state/munge/seed"
  wait_for 100 munge -S "$state/munge/socket" -n
}

start_accounting() {
  local socket=$state/run/my.sock
  [ -d "$state/mariadb/mysql" ] || mariadb-install-db --no-defaults --user="$user" --skip-test-db \
    --datadir="$state/mariadb" --auth-root-authentication-method=socket --auth-root-socket-user="$user" \
    >"$state/log/mariadb-install.out" 2>&1
  run mariadbd '' mariadbd --no-defaults --user="$user" --datadir="$state/mariadb" --socket="$socket" \
    --pid-file="$state/run/own.my.pid" --skip-networking --innodb-buffer-pool-size=64M \
    --innodb-flush-log-at-trx-commit=0 --innodb-lock-wait-timeout=900
  wait_for 300 mariadb --no-defaults -S "$socket" -u "$user" -e 'select 1'
  (umask 077 && printf '%s\n' "DbdHost=$host" DbdAddr=127.0.0.1 "DbdPort=$((PORT + NODES + 1))" \
    "SlurmUser=$user" AuthType=auth/munge "AuthInfo=socket=$state/munge/socket" \
    CommunicationParameters=NoInAddrAny "LogFile=$state/log/slurmdbd.log" "PidFile=$state/run/own.dbd.pid" \
    StorageType=accounting_storage/mysql StorageHost=localhost "StorageUser=$user" \
    StorageLoc=slurm_acct >"$state/slurmdbd.conf")
  run slurmdbd "$host" env MYSQL_UNIX_PORT="$socket" slurmdbd -D
  wait_for 300 timeout 5 sacctmgr -n show cluster
  sacctmgr -n show cluster format=cluster | grep -qw lab || sacctmgr -i add cluster lab >/dev/null
}

nodes_are_up() {
  [ "$(sinfo -h -N -o '%N %T' | sort -u | grep -cE ' (idle|mixed|allocated|completing|planned)$')" = "$NODES" ]
}

[ -f "$state/slurm.conf" ] || configure
export SLURM_CONF=$state/slurm.conf
start_munge
[ $accounting = no ] || start_accounting
run slurmctld "$host" slurmctld -D
for i in $(seq "$NODES"); do
  run "slurmd.node$i" "node$i" slurmd -D -N "$(name "$i")"
done
wait_for 300 nodes_are_up
echo "nodes: $mode, accounting: $accounting, $(sinfo -h -o '%P %D %t %N' | tr '\n' ' ')"
