package rendezvous

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/euryale-ml/euryale/internal/testing/require"
)

func getenv(vars map[string]string) func(string) string {
	return func(name string) string { return vars[name] }
}

func TestReadEnv(t *testing.T) {
	type vars = map[string]string
	for name, c := range map[string]struct {
		vars vars
		want Env
	}{
		"nothing": {vars{}, Env{Job: "alone", Size: 1, LocalSize: 1, Launcher: "no launcher"}},
		"euryale run": {
			vars{"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4",
				"GROUP_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1234",
				"EURYALE_JOB": "j", "EURYALE_TOKEN": "t", "EURYALE_TIMEOUT": "5s"},
			Env{Launcher: "euryale run", Job: "j", Rank: 1, Size: 4, LocalRank: 1, LocalSize: 4,
				Addr: "127.0.0.1", Port: 1234, Token: "t", Timeout: 5 * time.Second}},
		"torchrun on two machines": {
			vars{"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4",
				"GROUP_RANK": "1", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500",
				"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": "0"},
			Env{Launcher: "torchrun", Job: "torchrun-none-0-10.0.0.1-29500", Rank: 5, Size: 8,
				LocalRank: 1, LocalSize: 4, Addr: "10.0.0.1", Port: 29500}},
		"a pod for each rank": {
			vars{"RANK": "2", "WORLD_SIZE": "3", "MASTER_ADDR": "job-0", "MASTER_PORT": "1"},
			Env{Launcher: "torchrun", Job: "torchrun-job-0-1", Rank: 2, Size: 3, LocalSize: 1,
				Addr: "job-0", Port: 1}},
		"an indexed job of Kubernetes": {
			vars{"JOB_COMPLETION_INDEX": "2", "WORLD_SIZE": "4", "MASTER_ADDR": "train-0.train",
				"MASTER_PORT": "29500", "EURYALE_TOKEN": "t"},
			Env{Launcher: "Kubernetes", Job: "kubernetes-train-0.train-29500", Rank: 2, Size: 4,
				LocalSize: 1, Addr: "train-0.train", Port: 29500, Token: "t"}},
		"euryale run in a pod of an indexed job": {
			vars{"JOB_COMPLETION_INDEX": "1", "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1",
				"LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "1",
				"EURYALE_JOB": "j"},
			Env{Launcher: "euryale run", Job: "j", Rank: 3, Size: 4, LocalRank: 1, LocalSize: 2,
				Addr: "h", Port: 1}},
		"by hand on one machine": {
			vars{"RANK": "2", "WORLD_SIZE": "3", "MASTER_PORT": "7"},
			Env{Launcher: "torchrun", Job: "torchrun-7", Port: 7, Rank: 2, Size: 3, LocalRank: 2,
				LocalSize: 3}},
		"port held by the launcher": {
			vars{"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1",
				"MASTER_ADDR": "h", "MASTER_PORT": "1", "EURYALE_PORT": "2"},
			Env{Launcher: "torchrun", Job: "torchrun-h-1", Size: 2, LocalSize: 1, Addr: "h",
				Port: 2}},
		"Open MPI 4 on one machine": {
			vars{"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4",
				"OMPI_COMM_WORLD_LOCAL_RANK": "3", "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
				"OMPI_COMM_WORLD_NODE_RANK": "3",
				"PMIX_NAMESPACE":            "2430205953",
				"OMPI_MCA_orte_hnp_uri":     "2430.0;tcp://10.0.0.1:1"},
			Env{Launcher: "mpirun", Job: "mpirun-2430205953-2430.0;tcp://10.0.0.1:1", Rank: 3,
				Size: 4, LocalRank: 3, LocalSize: 4}},
		"Open MPI 5 on two machines": {
			vars{"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4",
				"OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
				"PMIX_NAMESPACE": "prterun-h-17@1",
				"MASTER_ADDR":    "h", "MASTER_PORT": "7"},
			Env{Launcher: "mpirun", Job: "mpirun-prterun-h-17@1", Rank: 3, Size: 4, LocalRank: 1,
				LocalSize: 2, Addr: "h", Port: 7}},
		"Slurm": {
			vars{"SLURM_PROCID": "6", "SLURM_NTASKS": "7", "SLURM_LOCALID": "2",
				"SLURM_NODEID": "2", "SLURM_TASKS_PER_NODE": "2(x2),3", "SLURM_JOB_ID": "41",
				"SLURM_STEP_ID":      "1",
				"SLURM_JOB_NODELIST": "gpu[07-09]", "SLURM_LAUNCH_NODE_IPADDR": "10.9.9.9"},
			Env{Launcher: "srun", Job: "srun-41-1", Rank: 6, Size: 7, LocalRank: 2, LocalSize: 3,
				Addr: "gpu07", Port: 61440 + 657}},
		"Slurm on one machine": {
			vars{"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_LOCALID": "1",
				"SLURM_JOB_ID": "41", "SLURM_STEP_ID": "0", "SLURM_NTASKS_PER_NODE": "2",
				"SLURM_LAUNCH_NODE_IPADDR": "10.9.9.9"},
			Env{Launcher: "srun", Job: "srun-41-0", Rank: 1, Size: 2, LocalRank: 1, LocalSize: 2,
				Addr: "10.9.9.9", Port: 61440 + 656}},
		"the batch script of a Slurm job": {
			vars{"ENVIRONMENT": "BATCH", "SLURM_PROCID": "0", "SLURM_NTASKS": "7",
				"SLURM_LOCALID": "0", "SLURM_JOB_ID": "41"},
			Env{Launcher: "no launcher", Job: "alone", Size: 1, LocalSize: 1}},
		"mpirun in a Slurm job": {
			vars{"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2",
				"OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
				"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "PMIX_NAMESPACE": "n"},
			Env{Launcher: "mpirun", Job: "mpirun-n", Rank: 1, Size: 2, LocalRank: 1, LocalSize: 2}},
		"an agent of torchrun that holds its port": {
			vars{"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2",
				"GROUP_RANK": "0", "MASTER_ADDR": "h", "MASTER_PORT": "29500",
				"TORCHELASTIC_USE_AGENT_STORE": "True"},
			Env{Launcher: "torchrun", Job: "torchrun-h-29500", Size: 4, LocalSize: 2, Addr: "h",
				Port: 61440 + 29500%4096}},
		"EURYALE_PORT before the agent's": {
			vars{"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2",
				"MASTER_ADDR": "h", "MASTER_PORT": "29500", "TORCHELASTIC_USE_AGENT_STORE": "True",
				"EURYALE_PORT": "9"},
			Env{Launcher: "torchrun", Job: "torchrun-h-29500", Size: 4, LocalSize: 2, Addr: "h",
				Port: 9}},
		"Hydra on one machine": {
			vars{"PMI_RANK": "1", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4",
				"PMI_FD": "8", "EURYALE_JOB": "j"},
			Env{Launcher: "mpiexec", Job: "j", Rank: 1, Size: 4, LocalRank: 1, LocalSize: 4}},
		"Hydra on two machines": {
			vars{"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2",
				"MASTER_ADDR": "h", "MASTER_PORT": "7"},
			Env{Launcher: "mpiexec", Job: "mpiexec", Rank: 3, Size: 4, LocalRank: 1, LocalSize: 2,
				Addr: "h", Port: 7}},
		"mpirun_rsh of MVAPICH": {
			vars{"MV2_COMM_WORLD_RANK": "1", "MV2_COMM_WORLD_SIZE": "2",
				"MV2_COMM_WORLD_LOCAL_RANK": "1", "MV2_COMM_WORLD_LOCAL_SIZE": "2",
				"EURYALE_JOB": "j"},
			Env{Launcher: "mpiexec", Job: "j", Rank: 1, Size: 2, LocalRank: 1, LocalSize: 2}},
		"PMI variables alone": {
			vars{"PMI_RANK": "0", "PMI_SIZE": "2", "EURYALE_JOB": "j"},
			Env{Launcher: "mpiexec", Job: "j", Size: 2, LocalSize: 2}},
		"torchrun in a Slurm step": {
			vars{"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2",
				"MASTER_PORT": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_STEP_ID": "0"},
			Env{Launcher: "torchrun", Job: "torchrun-7", Rank: 1, Size: 2, LocalRank: 1,
				LocalSize: 2, Port: 7}},
		"euryale run under mpiexec": {
			vars{"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2",
				"EURYALE_JOB": "j", "PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "3"},
			Env{Launcher: "euryale run", Job: "j", Rank: 1, Size: 2, LocalRank: 1, LocalSize: 2}},
		"Hydra whose proxies srun started": {
			vars{"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2",
				"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_STEP_ID": "0", "EURYALE_JOB": "j"},
			Env{Launcher: "mpiexec", Job: "j", Rank: 1, Size: 2, LocalRank: 1, LocalSize: 2}},
		"srun that gives PMI's variables, too": {
			vars{"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_LOCALID": "1",
				"SLURM_JOB_ID": "41", "SLURM_STEP_ID": "0", "SLURM_NTASKS_PER_NODE": "2",
				"PMI_RANK": "1", "PMI_SIZE": "2", "PMIX_RANK": "1"},
			Env{Launcher: "srun", Job: "srun-41-0", Rank: 1, Size: 2, LocalRank: 1, LocalSize: 2,
				Port: 61440 + 656}},
		"a Slurm allocation alone": {
			vars{"SLURM_JOB_ID": "41", "SLURM_NTASKS": "8"}, Env{Job: "alone", Size: 1,
				LocalSize: 1, Launcher: "no launcher"}},
		"signs of one rank": {
			vars{"PET_NNODES": "1", "PET_NODE_RANK": "0", "NNODES": "1:1", "NODE_RANK": "0",
				"PBS_TASKNUM": "1", "AWS_BATCH_JOB_NUM_NODES": "1", "_CONDOR_NPROCS": "1",
				"TF_CONFIG": `{"cluster": {"worker": ["a:1"]}}`, "HOROVOD_SIZE": "1",
				"JSM_NAMESPACE_SIZE": "1"},
			Env{Job: "jsrun", Size: 1, LocalSize: 1, Launcher: "jsrun"}},
		"alone, as it says": {
			vars{"PMIX_RANK": "3", "EURYALE_ALONE": "1", "EURYALE_TLS": "1"}, Env{Job: "alone",
				Size: 1, LocalSize: 1, Launcher: "no launcher", TLS: true}},
		"timeout in seconds": {vars{"EURYALE_TIMEOUT": "1.5"},
			Env{Job: "alone", Size: 1, LocalSize: 1, Launcher: "no launcher", Timeout: 1500 *
				time.Millisecond}},
	} {
		t.Run(name, func(t *testing.T) {
			if c.want.Timeout == 0 {
				c.want.Timeout = DefaultTimeout
			}
			got, err := ReadEnv(getenv(c.vars))
			require.Check(t, err == nil && got == c.want, "got  %+v, %v\nwant %+v", got, err,
				c.want)
		})
	}
}

func TestBadEnvironmentsAreExplained(t *testing.T) {
	type vars = map[string]string
	for name, c := range map[string]struct {
		vars vars
		want string // parts of the message, separated by |
	}{
		"rank without size": {vars{"RANK": "0"}, "WORLD_SIZE is not set|euryale run"},
		"size without rank": {vars{"WORLD_SIZE": "2"}, "RANK is not set|euryale run"},
		"rank out of range": {vars{"EURYALE_JOB": "j", "RANK": "2", "WORLD_SIZE": "2"},
			"rank 2 is out of range|0 to 1"},
		"no ranks":      {vars{"RANK": "0", "WORLD_SIZE": "0"}, "0 ranks|at least 1"},
		"negative rank": {vars{"RANK": "-1", "WORLD_SIZE": "2"}, `RANK="-1"`},
		"garbage": {vars{"RANK": "one", "WORLD_SIZE": "2"},
			`RANK="one": use a number of 0 or more`},
		"local size over size": {vars{"EURYALE_JOB": "j", "RANK": "0", "WORLD_SIZE": "2",
			"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "3"}, "3 local ranks"},
		"local rank out of range": {vars{"EURYALE_JOB": "j", "RANK": "0", "WORLD_SIZE": "2",
			"LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "2"}, "local rank 2 is out of range"},
		"port":            {vars{"MASTER_PORT": "70000"}, "port 70000 is out of range"},
		"timeout":         {vars{"EURYALE_TIMEOUT": "soon"}, `EURYALE_TIMEOUT="soon"|90s`},
		"timeout of zero": {vars{"EURYALE_TIMEOUT": "0"}, `EURYALE_TIMEOUT="0"`},
		"half of Open MPI": {vars{"OMPI_COMM_WORLD_RANK": "0"},
			"OMPI_COMM_WORLD_SIZE is not set"},
		"half of Slurm": {vars{"SLURM_PROCID": "0"}, "SLURM_NTASKS is not set"},
		"Slurm's counts": {vars{"SLURM_PROCID": "0", "SLURM_NTASKS": "2",
			"SLURM_LOCALID": "0", "SLURM_TASKS_PER_NODE": "2(y3)"}, "2(y3)"},
		"no job, by hand": {vars{"RANK": "0", "WORLD_SIZE": "2"},
			"RANK=0|MASTER_PORT|EURYALE_JOB"},
		"half of PMI": {vars{"PMI_RANK": "0"},
			"PMI_RANK=0|PMI_SIZE is not set"},
		"no job of two proxies": {vars{"PMI_RANK": "0", "PMI_SIZE": "4", "MPI_LOCALRANKID": "0",
			"MPI_LOCALNRANKS": "2"}, "MASTER_PORT|EURYALE_JOB"},
		"sign of PMI":  {vars{"PMI_SIZE": "2"}, "PMI_SIZE=2|EURYALE_ALONE=1"},
		"sign of PMIx": {vars{"PMIX_RANK": "0"}, "PMIX_RANK=0|EURYALE_ALONE=1"},
		"sign of PALS": {vars{"PALS_RANKID": "1"}, "PALS_RANKID=1|EURYALE_ALONE=1"},
		"sign of Flux": {vars{"FLUX_TASK_RANK": "0", "EURYALE_ALONE": "0"},
			"FLUX_TASK_RANK=0|EURYALE_ALONE=1"},
		"indexed job, no address": {vars{"JOB_COMPLETION_INDEX": "2", "WORLD_SIZE": "4"},
			"MASTER_ADDR and MASTER_PORT"},
		"sign of an indexed job": {vars{"JOB_COMPLETION_INDEX": "2"},
			"JOB_COMPLETION_INDEX=2|EURYALE_ALONE=1"},
		"sign of a Slurm step": {vars{"SLURM_STEP_NUM_TASKS": "4"},
			"SLURM_STEP_NUM_TASKS=4|EURYALE_ALONE=1"},

		"sign of torchrun's agents": {vars{"PET_NNODES": "2"},
			"PET_NNODES=2|EURYALE_ALONE=1|RANK, WORLD_SIZE"},
		"sign of a range of agents": {vars{"PET_NNODES": "1:4"}, "PET_NNODES=1:4|EURYALE_ALONE=1"},
		"sign of an agent": {vars{"PET_NODE_RANK": "1"},
			"PET_NODE_RANK=1|EURYALE_ALONE=1"},
		"sign of PBS": {vars{"PBS_TASKNUM": "2"}, "PBS_TASKNUM=2|EURYALE_ALONE=1"},
		"sign of AWS Batch": {vars{"AWS_BATCH_JOB_NUM_NODES": "2"},
			"AWS_BATCH_JOB_NUM_NODES=2|EURYALE_ALONE=1"},
		"sign of HTCondor": {vars{"_CONDOR_NPROCS": "3"},
			"_CONDOR_NPROCS=3|EURYALE_ALONE=1"},
		"sign of Volcano": {vars{"VC_TASK_INDEX": "0"},
			"VC_TASK_INDEX=0|EURYALE_ALONE=1"},
		"sign of TensorFlow": {vars{"TF_CONFIG": `{"cluster": {"chief": ["a:1"], ` +
			`"worker": ["b:1"]}, ` +
			`"task": {"type": "worker", "index": 0}}`},
			`TF_CONFIG={"cluster"|EURYALE_ALONE=1`},
		"sign of TensorFlow, spoilt": {vars{"TF_CONFIG": `{"cluster"`},
			`TF_CONFIG={"cluster" is the sign`},
		"sign of nodes": {vars{"NNODES": "2"}, "NNODES=2|EURYALE_ALONE=1"},
		"sign of a node": {vars{"NODE_RANK": "1", "NNODES": "2"},
			"NNODES=2|EURYALE_ALONE=1"},
		"sign of a node alone": {vars{"NODE_RANK": "1"}, "NODE_RANK=1|EURYALE_ALONE=1"},
		"sign of Horovod":      {vars{"HOROVOD_SIZE": "2"}, "HOROVOD_SIZE=2|EURYALE_ALONE=1"},
		"sign of jsrun": {vars{"JSM_NAMESPACE_SIZE": "2"},
			"JSM_NAMESPACE_SIZE=2|EURYALE_ALONE=1"},

		"encrypted or not": {vars{"EURYALE_TLS": "on"}, `EURYALE_TLS="on"|use 1 or 0`},
		"alone or not":     {vars{"EURYALE_ALONE": "yes"}, `EURYALE_ALONE="yes"`},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := ReadEnv(getenv(c.vars))
			var bad *envError
			require.That(t, errors.As(err, &bad) && bad.ExitCode() == 2, "got %v", err)
			for part := range strings.SplitSeq(c.want, "|") {
				require.Fails(t, "ReadEnv", err, part)
			}
		})
	}
}

func TestAddressThatNobodyCanDialIsRefusedAtOnce(t *testing.T) {
	for addr, want := range map[string]string{
		"[fd77::1]":            "write MASTER_ADDR=fd77::1",
		"[fd77::1]:29500":      "write MASTER_ADDR=fd77::1 and MASTER_PORT=29500",
		"tcp://":               "neither a name nor an IP address",
		"tcp://10.0.0.1:29500": "write MASTER_ADDR=10.0.0.1 and MASTER_PORT=29500",
		"tcp://node-0/":        "write MASTER_ADDR=node-0",
		"node-0:29500":         "write MASTER_ADDR=node-0 and MASTER_PORT=29500",
		"10.0.0.256":           "neither a name nor an IP address",
		"node 0":               "neither a name nor an IP address",
		"a,b":                  "neither a name nor an IP address",
		"0.0.0.0": "rank 1 cannot connect to it: set it to the name or address " +
			"of rank 0's machine",
		"::":      "rank 1 cannot connect to it",
		"fd77::1": "", "fe80::1%eth0": "", "10.0.0.1": "", "node-0": "",
		"train_0.ns.svc.": "", "localhost": "",
	} {
		vars := map[string]string{"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0",
			"LOCAL_WORLD_SIZE": "1",
			"MASTER_ADDR":      addr, "MASTER_PORT": "29500"}
		_, err := ReadEnv(getenv(vars))
		if want == "" && err == nil || want != "" && err != nil && strings.Contains(err.Error(),
			want) {
			continue
		}
		t.Errorf("MASTER_ADDR=%s: %v, want %q", addr, err, want)
	}
	for _, rank := range []string{"0", "1"} {
		vars := map[string]string{"RANK": rank, "WORLD_SIZE": "4", "LOCAL_RANK": rank,
			"LOCAL_WORLD_SIZE": "2",
			"MASTER_ADDR":      "0.0.0.0", "MASTER_PORT": "29500"}
		if _, err := ReadEnv(getenv(vars)); err != nil {
			t.Errorf("rank %s of the machine that listens at all addresses: %v", rank, err)
		}
	}
}

func TestJobNamesStayShortAndDifferent(t *testing.T) {
	long1, long2 := strings.Repeat("x", 200)+"1", strings.Repeat("x", 200)+"2"
	a, b := short(long1), short(long2)
	if a == b || len(a) > maxLabel || short("a b") == short("a_b") || short("plain") != "plain" {
		t.Errorf("%q, %q, %q", a, b, short("a b"))
	}
}

func TestFoundWorldSizeIsBounded(t *testing.T) {
	_, err := ReadEnv(getenv(map[string]string{"RANK": "0", "WORLD_SIZE": "1000000000",
		"EURYALE_JOB": "j"}))
	require.Fails(t, "ReadEnv", err, "a world of 1000000000 ranks: at most 65536 are possible")
}

func TestTimeoutIsReadWithItsUnit(t *testing.T) {
	for text, want := range map[string]time.Duration{"": DefaultTimeout, "90s": 90 * time.Second,
		"1.5": 1500 * time.Millisecond} {
		e, err := ReadEnv(getenv(map[string]string{"EURYALE_TIMEOUT": text}))
		require.Check(t, e.Timeout == want && err == nil, "%q: %v, %v, want %v", text, e.Timeout,
			err, want)
	}
}
