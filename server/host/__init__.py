"""The machine beneath: files that change or hang, run folders, tasks, processes for jobs."""
