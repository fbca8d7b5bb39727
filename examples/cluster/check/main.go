// Command check reads manifests of Kubernetes strictly, by the types of its API, and sees that what
// they tell the ranks is what Kubernetes makes of them: go run . ../kubernetes.yaml ../jobset.yaml
package main

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"time"

	mpi "github.com/kubeflow/mpi-operator/pkg/apis/kubeflow/v2beta1"
	trainer "github.com/kubeflow/trainer/v2/pkg/apis/trainer/v1alpha1"
	batch "k8s.io/api/batch/v1"
	core "k8s.io/api/core/v1"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
	jobset "sigs.k8s.io/jobset/api/jobset/v1alpha2"
	lws "sigs.k8s.io/lws/api/leaderworkerset/v1"
	"sigs.k8s.io/yaml"
)

func main() {
	failed := false
	for _, name := range os.Args[1:] {
		if err := check(name); err != nil {
			fmt.Fprintf(os.Stderr, "%s: %v\n", name, err)
			failed = true
		}
	}
	if failed {
		os.Exit(1)
	}
}

// check reads the documents of a file.
func check(name string) error {
	text, err := os.ReadFile(name)
	if err != nil {
		return err
	}
	var service core.Service
	ranks := 0
	for _, part := range bytes.Split(text, []byte("\n---\n")) {
		var kind meta.TypeMeta
		if err := yaml.Unmarshal(part, &kind); err != nil {
			return err
		}
		switch kind.APIVersion + " " + kind.Kind {
		case "v1 Service":
			err = yaml.UnmarshalStrict(part, &service)
		case "batch/v1 Job":
			var j batch.Job
			if err = yaml.UnmarshalStrict(part, &j); err == nil {
				ranks++
				err = errors.Join(reaches(service, j), starts(j.Spec, j.Name+"-0."+service.Name))
			}
		case "jobset.x-k8s.io/v1alpha2 JobSet":
			var s jobset.JobSet
			if err = yaml.UnmarshalStrict(part, &s); err == nil {
				ranks++
				err = checkSet(s)
			}
		case "leaderworkerset.x-k8s.io/v1 LeaderWorkerSet":
			var s lws.LeaderWorkerSet
			if err = yaml.UnmarshalStrict(part, &s); err == nil {
				ranks++
				err = waits(s.Spec.LeaderWorkerTemplate.WorkerTemplate.Spec)
			}
		case "trainer.kubeflow.org/v1alpha1 TrainingRuntime":
			var r trainer.TrainingRuntime
			if err = yaml.UnmarshalStrict(part, &r); err == nil {
				ranks++
				err = waits(r.Spec.Template.Spec.ReplicatedJobs[0].Template.Spec.Template.Spec)
			}
		case "trainer.kubeflow.org/v1alpha1 TrainJob":
			err = yaml.UnmarshalStrict(part, new(trainer.TrainJob))
		case "kubeflow.org/v2beta1 MPIJob":
			var j mpi.MPIJob
			if err = yaml.UnmarshalStrict(part, &j); err == nil {
				ranks++
				err = checkMPI(j.Spec.MPIReplicaSpecs)
			}
		default:
			err = fmt.Errorf("no %s %s is known here", kind.APIVersion, kind.Kind)
		}
		if err != nil {
			return fmt.Errorf("%s: %w", kind.Kind, err)
		}
	}
	if ranks != 1 {
		return fmt.Errorf("it starts %d jobs, not one", ranks)
	}
	return nil
}

// reaches checks that a service names the pods of a job, from their start.
func reaches(s core.Service, j batch.Job) error {
	switch {
	case s.Spec.ClusterIP != core.ClusterIPNone || !s.Spec.PublishNotReadyAddresses:
		return errors.New(
			"the service is not headless, or does not publish pods that are not ready")
	case s.Spec.Selector["job-name"] != j.Name || j.Spec.Template.Spec.Subdomain != s.Name:
		return errors.New("the service is not that of the job's pods")
	}
	return nil
}

// checkMPI checks the launcher, whose command has the --grace of the workers.
func checkMPI(of map[mpi.MPIReplicaType]*mpi.ReplicaSpec) error {
	launcher, worker := of[mpi.MPIReplicaTypeLauncher], of[mpi.MPIReplicaTypeWorker]
	if launcher == nil || worker == nil || len(launcher.Template.Spec.Containers) == 0 ||
		len(worker.Template.Spec.Containers) == 0 {
		return errors.New("it lacks a Launcher or a Worker with a container")
	}
	pod := worker.Template.Spec
	pod.Containers[0].Command = launcher.Template.Spec.Containers[0].Command
	return waits(pod)
}

// waits checks that a pod of an elastic job has more time to end than its command gives the ranks.
func waits(pod core.PodSpec) error {
	command := pod.Containers[0].Command
	if !slices.Contains(command, "--elastic") {
		return nil
	}
	grace, err := time.ParseDuration(command[slices.Index(command, "--grace")+1])
	if t := pod.TerminationGracePeriodSeconds; err != nil || t == nil ||
		time.Duration(*t)*time.Second <= grace {
		return fmt.Errorf("--grace is %v, and a pod has less time: %v", grace, err)
	}
	return nil
}

func checkSet(s jobset.JobSet) error {
	if jobs := s.Spec.ReplicatedJobs; len(jobs) != 1 || jobs[0].Replicas != 1 {
		return errors.New("the index of a pod is its rank in a single job only")
	}
	if n := s.Spec.Network; n == nil || n.EnableDNSHostnames == nil || !*n.EnableDNSHostnames ||
		n.PublishNotReadyAddresses == nil || !*n.PublishNotReadyAddresses {
		return errors.New("pods have no names, or not before they are ready")
	}
	job := s.Spec.ReplicatedJobs[0]
	return starts(job.Template.Spec, s.Name+"-"+job.Name+"-0-0."+s.Name)
}

// starts checks what a job tells its ranks, the first of which is a pod of that name.
func starts(j batch.JobSpec, first string) error {
	if j.CompletionMode == nil || *j.CompletionMode != batch.IndexedCompletion ||
		j.Completions == nil || j.Parallelism == nil || *j.Completions != *j.Parallelism {
		return errors.New("ranks need an index, and run at the same time: set completionMode, " +
			"completions and parallelism")
	}
	pod := j.Template.Spec
	if len(pod.Containers) != 1 || len(pod.Volumes) == 0 {
		return errors.New("a rank is one container, with a volume")
	}
	if err := waits(pod); err != nil {
		return err
	}
	given := map[string]string{}
	for _, v := range pod.Containers[0].Env {
		given[v.Name] = v.Value
		if v.Name == "EURYALE_TOKEN" && (v.ValueFrom == nil || v.ValueFrom.SecretKeyRef == nil) {
			return errors.New("the token is not from a secret")
		}
	}
	for name, want := range map[string]string{"WORLD_SIZE": strconv.Itoa(int(*j.Completions)),
		"MASTER_ADDR": first, "MASTER_PORT": "29500", "EURYALE_TOKEN": ""} {
		if value, ok := given[name]; !ok || value != want {
			return fmt.Errorf("%s is %q, want %q", name, value, want)
		}
	}
	mounts, shm := pod.Containers[0].VolumeMounts, pod.Volumes[0]
	if len(mounts) == 0 || mounts[0].Name != shm.Name || mounts[0].MountPath != "/dev/shm" ||
		shm.EmptyDir == nil || shm.EmptyDir.Medium != core.StorageMediumMemory {
		return errors.New("/dev/shm is not a volume in memory")
	}
	return nil
}
