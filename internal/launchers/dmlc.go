package launchers

// dmlc is the tracker of MXNet and XGBoost. Servers and schedulers have its variables, too, and the
// tracker listens at the address that it gives.
// https://xgboost.readthedocs.io/en/stable/tutorials/kubernetes.html
func dmlc() Contract {
	return Contract{Name: "the DMLC tracker", Size: counts{"DMLC_NUM_WORKER"},
		Signs: []string{"DMLC_TASK_ID", "DMLC_WORKER_ID", "DMLC_NUM_WORKER", "DMLC_TRACKER_URI",
			"DMLC_PS_ROOT_URI"}}
}
